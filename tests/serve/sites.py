"""Pages of other sites in a headless Chromium ask a server for what they may not: `sites.py MLCC ARTIFACT`. Skipped where there is no Chromium."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# What a page can send without asking first, and one request that is asked for.
PAGE = """<!doctype html><body>waiting<script>
const server = "%s", text = JSON.stringify({prompt: "a", max_tokens: 1}), model = JSON.stringify({model: "%s"});
const send = (path, body, headers = {}, mode = "no-cors") =>
    fetch(server + path, {method: "POST", body, headers, mode}).then((r) => r.type + r.status, () => "failed");
const all = [
    send("/v1/completions", text),
    send("/v1/completions", text, {"content-type": "text/plain"}),
    send("/v1/completions", new Blob([text])),
    send("/v1/completions", new URLSearchParams({[text]: ""})),
    send("/models/unload", model),
    send("/v1/completions", text, {"content-type": "application/json"}, "cors"),
    Promise.resolve(String(navigator.sendBeacon(server + "/models/unload", model))),
    fetch(server + "/v1/models").then((r) => r.text(), () => "failed"),
];
Promise.all(all).then((done) => { document.body.textContent = JSON.stringify(done); });
</script>"""


class Evil(http.server.BaseHTTPRequestHandler):
    page = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_):
        pass


def seen(browser, url, folder):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=20000",
             "--host-resolver-rules=MAP evil.example 127.0.0.1", "--dump-dom"]
    return subprocess.run([browser, *flags, url], capture_output=True, text=True, timeout=120, check=True).stdout


def answers(url):
    """How many answers of which status each path has given, as the server counts them."""
    with urllib.request.urlopen(url + "/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'mlcc_requests_total\{path="([^"]*)",status="(\d+)"\} (\d+)', text)
    return {(path, status): int(count) for path, status, count in found}, text


def main(mlcc, artifact):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("skipped: there is no Chromium")
        return
    server = subprocess.Popen([mlcc, "serve", artifact, "--port", "0", "--json", "--quiet", "--alias", "books"],
                              stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["url"]
        Evil.page = (PAGE % (url, "books")).encode()
        other = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for name in ("127.0.0.1", "localhost", "evil.example"):
            with tempfile.TemporaryDirectory() as folder:
                page = seen(browser, f"http://{name}:{other.server_address[1]}/", folder)
            print(f"a page of {name}:", re.search(r"<body>(.*)</body>", page, re.S).group(1))
        port = url.rsplit(":", 1)[1]
        with tempfile.TemporaryDirectory() as folder:
            rebound = seen(browser, f"http://evil.example:{port}/v1/models", folder)
        assert "other_host" in rebound and "books" not in rebound, rebound
        with tempfile.TemporaryDirectory() as folder:
            own = seen(browser, f"{url}/v1/models", folder)
        assert "books" in own, own
        count, metrics = answers(url)
        print("answers:", {f"{path} {status}": n for (path, status), n in sorted(count.items())})
        posts = {key: n for key, n in count.items() if key[0] in ("/v1/completions", "/models/unload")}
        assert posts and all(status in ("403", "405") for _, status in posts), posts
        assert posts["/v1/completions", "403"] >= 12 and posts["/models/unload", "403"] >= 6, posts
        assert 'mlcc_texts_finished_total{model="books"} 0' in metrics, "a text was started"
        print("ok: no page of another site has started a text or unloaded a model")
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2]).resolve()))
