"""examples/ray/app.py on a Ray of this machine."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/ray"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Ray with a proxy, whose address it gives."""
    port = free_port()
    environment = {"env_vars": {"PYTHONPATH": sys.path[0]}}
    # Replicas count CPUs; the tests do not care how many there are.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(replicas: int) -> None:
    """The application with that many replicas, when all of them take requests."""
    import app

    fixed: Any = app.Server.options(num_replicas=replicas, autoscaling_config=None)
    serve.run(fixed.bind(), name="mlcc", route_prefix="/")
