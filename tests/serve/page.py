"""The page of `mlcc serve` in a headless Chromium, over the toy model: `tests/serve/run`. A second argument is a folder for pictures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import expect, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MARKUP = "<img src=x onerror=\"document.title='broken'\"> <script>document.title='broken'</script> [link](javascript:0)"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"], "additionalProperties": False}}}]
SAID = """**RWKV** keeps a *state* of fixed size, and needs no cache that grows with the text:

1. each layer reads the state,
2. and writes it again.

```rust
let state = layer.step(token, state)?;
```
"""


def ask(page, text):
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def settled(page):
    expect(page.locator("#messages")).to_have_attribute("aria-busy", "false")


def setting(page, name, value):
    page.locator(f"#settings [name={name}]").fill(str(value))


def edit(page, article, text, button):
    article.get_by_role("button", name="Edit").click()
    page.locator(".editor textarea").fill(text)
    page.locator(".editor").get_by_role("button", name=button, exact=True).click()


def picture(page, folder, name):
    """Few colours: the file stays small."""
    if folder is None:
        return
    path = folder / f"serve-{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)
    assert path.stat().st_size < 100_000, f"{path} is too large"


def wants_the_key(page, url):
    page.goto(url)
    expect(page.locator("#state")).to_contain_text("API key")
    key = page.locator("#settings [name=key]")
    key.fill("key")
    key.blur()
    expect(page.locator("#model option")).to_have_text(["toy"])
    expect(page.locator("#state")).to_contain_text("context 4000")


def streams_stops_and_goes_on(page):
    ask(page, "Hello")
    answer = page.locator("article.assistant")
    expect(answer).to_contain_text("writing")
    expect(answer.locator(".content")).not_to_be_empty()
    page.keyboard.press("Escape")
    settled(page)
    expect(answer).to_contain_text("stopped")
    setting(page, "max_tokens", 12)
    setting(page, "seed", 3)
    answer.get_by_role("button", name="Regenerate").click()
    settled(page)
    expect(answer).to_contain_text("tokens/s")
    expect(answer).to_contain_text("prompt tokens known")
    first = answer.locator(".content").inner_text()
    answer.get_by_role("button", name="Regenerate").click()
    settled(page)
    assert answer.locator(".content").inner_text() == first, "an equal seed writes an equal text"
    edit(page, page.locator("article.user"), "Hello again", "Save and ask")
    settled(page)
    assert page.locator("article").count() == 2
    assert answer.locator(".content").inner_text() != first
    ask(page, "More")
    settled(page)
    assert page.locator("article").count() == 4


def markup_stays_inert(page):
    page.keyboard.press("Alt+n")
    setting(page, "max_tokens", "")
    setting(page, "schema", json.dumps({"enum": [MARKUP]}))
    ask(page, MARKUP)
    settled(page)
    for article in page.locator("article").all():
        expect(article).to_contain_text("onerror")
    assert page.locator("#messages img, #messages script, #messages a").count() == 0
    assert page.title() == "mlcc"
    setting(page, "schema", "{")
    ask(page, "and now?")
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    setting(page, "schema", "")
    # Code that gets past everything else is refused by the policy.
    refused = page.evaluate("() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } }")
    assert refused == "TypeError", refused


def shows_alternatives(page, folder):
    page.keyboard.press("Alt+n")
    setting(page, "max_tokens", "")
    setting(page, "alternatives", 5)
    setting(page, "schema", json.dumps({"type": "object", "properties": {"city": {"enum": ["Ulm ☂", "Jena"]}}, "required": ["city"]}))
    setting(page, "seed", 4)
    ask(page, "Where does it rain?")
    settled(page)
    tokens = page.locator(".tokens span")
    written = json.loads(page.locator(".tokens").inner_text())
    assert written["city"] in ("Ulm ☂", "Jena"), written
    tokens.nth(3).hover()
    expect(page.get_by_role("tooltip")).to_contain_text("%")
    assert page.locator("#tip tr").count() >= 5
    picture(page, folder, "alternatives")
    setting(page, "alternatives", 0)
    setting(page, "schema", "")


def shows_calls(page):
    page.keyboard.press("Alt+n")
    setting(page, "max_tokens", 20)
    setting(page, "tools", json.dumps(TOOLS))
    ask(page, "Hello")
    settled(page)
    # The toy calls nothing by itself: the page is given an answer as the server would stream it.
    call = {"index": 0, "id": "abc", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":"}}
    rest = {"index": 0, "function": {"arguments": " \"Ulm\"}"}}
    pieces = [{"choices": [{"delta": {"tool_calls": [part]}, "finish_reason": None}]} for part in (call, rest)]
    pieces.append({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"
    asked = []

    def called(route):
        asked.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", called)
    page.locator("article.assistant").get_by_role("button", name="Regenerate").click()
    settled(page)
    page.unroute("**/v1/chat/completions")
    assert asked[0]["tools"] == TOOLS
    expect(page.locator(".call")).to_contain_text('"city": "Ulm"')
    page.get_by_label("Result of weather").fill("rain")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Send results").click()
    messages = sent.value.post_data_json["messages"]
    assert messages[-1] == {"role": "tool", "content": "rain", "tool_call_id": "abc"}, messages
    assert messages[-2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ulm"}'
    settled(page)
    assert page.locator("article").count() == 4 and page.get_by_role("alert").count() == 0
    setting(page, "tools", "")


def keeps_conversations(page, folder):
    page.keyboard.press("Alt+n")
    setting(page, "system", "Answer briefly.")
    setting(page, "max_tokens", 5)
    ask(page, "How does RWKV remember?")
    settled(page)
    edit(page, page.locator("article.assistant"), SAID, "Save")
    expect(page.locator("article.assistant ol li")).to_have_count(2)
    assert page.locator("article.assistant pre code").inner_text().startswith("let state")
    page.reload()
    expect(page.locator("#conversations button")).to_have_count(5)
    page.locator("#conversations button").first.click()
    expect(page.locator("article.assistant strong")).to_have_text("RWKV")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "And attention?")
    messages = sent.value.post_data_json["messages"]
    assert messages[0] == {"role": "system", "content": "Answer briefly."} and messages[2]["content"] == SAID
    settled(page)
    edit(page, page.locator("article.assistant").nth(1), "It keeps the keys and values of *all* tokens.", "Save")
    picture(page, folder, "chat")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    kept = json.loads(Path(download.value.path()).read_text())
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"] * 2
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.locator("#conversations button")).to_have_count(4)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(download.value.path())
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator("#conversations button")).to_have_count(5)


def looks_right(page, folder):
    page.keyboard.press("Alt+s")
    page.locator("#settings [name=theme]").select_option("dark")
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    picture(page, folder, "settings")
    page.locator("#settings [name=theme]").select_option("light")
    assert page.evaluate(back) == "rgb(255, 255, 255)" != dark
    page.keyboard.press("Alt+s")
    page.set_viewport_size({"width": 390, "height": 700})
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not page.evaluate(wide), "a phone would scroll sideways"
    picture(page, folder, "phone")
    expect(page.locator("#side")).not_to_be_visible()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#side")).to_be_visible()
    page.locator("#conversations button").first.click()
    expect(page.locator("#side")).not_to_be_visible()


def main():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"page: skipped, none of {', '.join(BROWSERS)} is installed")
        return
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    server = subprocess.Popen([sys.argv[1], "5"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1100, "height": 640}, color_scheme="light")
            problems, outside = [], []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.on("request", lambda request: None if request.url.startswith((url, "blob:")) else outside.append(request.url))
            wants_the_key(page, url)
            streams_stops_and_goes_on(page)
            shows_alternatives(page, folder)
            shows_calls(page)
            # What the page did by itself; the test's own attack is told on the console too.
            unexpected = [text for text in problems if "401" not in text]
            assert not unexpected, unexpected
            markup_stays_inert(page)
            keeps_conversations(page, folder)
            looks_right(page, folder)
            assert not outside, outside
            print(f"page in Chromium {chromium.version}: ok")
            chromium.close()
    finally:
        server.stdin.close()
        server.wait()


main()
