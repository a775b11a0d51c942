"""A server that is started as the manifests say: what probes, Prometheus, the autoscaler and clients of the manifests find there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from manifests import ROOT, container, kustomize, of_kind

KEY = "one"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def status(url: str, key: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def main() -> None:
    program, kubectl = sys.argv[1:]
    objects = kustomize(kubectl, "cpu", ["api-key"])
    one = container(objects)
    with tempfile.TemporaryDirectory() as folder:
        artifact = str(Path(folder) / "model.so")
        books = str(ROOT / "assets/rwkv4-tiny-books")
        subprocess.run([program, "build", "-q", "-m", books, "-o", artifact, "--no-report"], check=True)
        port = free_port()
        # Where the model lies and who listens is the container's business here, all else is as it stands there.
        changed = {"/models/model.so": artifact, "--host=0.0.0.0": "--host=127.0.0.1", "--port=8080": f"--port={port}"}
        assert changed.keys() <= set(one["args"])
        args = [changed.get(arg, arg) for arg in one["args"]]
        names = [variable["name"] for variable in one["env"]]
        assert names == ["MLCC_API_KEY"]
        environment = {**os.environ, "MLCC_API_KEY": f"{KEY},two", "MLCC_THREADS": "1"}
        server = subprocess.Popen([program, *args], env=environment, stderr=subprocess.DEVNULL)
        try:
            check(f"http://127.0.0.1:{port}", objects, server)
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()
    print("a server as the manifests start it: probes, metrics, keys, SIGTERM")


def check(url: str, objects: list, server: subprocess.Popen) -> None:
    one = container(objects)
    probes = {one[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    for path in sorted(probes):
        until = time.monotonic() + 60
        while True:
            assert server.poll() is None, "the server has ended"
            try:
                assert status(url + path)[0] == 200, path
                break
            except urllib.error.URLError:
                assert time.monotonic() < until, "the server does not listen"
                time.sleep(0.05)
    endpoint = of_kind(objects, "ServiceMonitor")["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"]["key"] == "metrics"
    assert status(url + endpoint["path"])[0] == 401
    found, text = status(url + endpoint["path"], KEY)
    assert found == 200
    alias = next(arg.split("=")[1] for arg in one["args"] if arg.startswith("--alias="))
    scaled = of_kind(objects, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    for line in [
        f'{scaled}{{model="{alias}"}} 0',
        f'vllm:num_requests_waiting{{model_name="{alias}"}} 0',
        f'vllm:num_requests_running{{model_name="{alias}"}} 0',
        f'vllm:kv_cache_usage_perc{{model_name="{alias}"}} 0.0',
    ]:
        assert line in text.splitlines(), line
    assert alias in status(url + "/v1/models", KEY)[1]


if __name__ == "__main__":
    main()
