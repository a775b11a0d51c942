"""The server of mlcc on Ray Serve: its routes, its page and its streams, in as many replicas as there is to do.

    cd examples/ray
    MLCC_MODEL=/path/to/model.so serve run app:app          # or: serve run serve.yaml
    curl http://127.0.0.1:8000/v1/completions -H 'x-session-id: 1' --json '{"prompt": "The sea was", "max_tokens": 20}'

Requests with the same `x-session-id` go to the same replica, which still has the state behind the conversation. The weights are pages of
one file: replicas on one machine share them.
"""

from __future__ import annotations

import os
from typing import Any

import mlcc
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

# Worker threads of a replica, which Ray counts as CPUs.
THREADS = int(os.environ.get("MLCC_THREADS", "2"))
# Texts that run together in a replica.
SEQUENCES = int(os.environ.get("MLCC_SEQUENCES", "16"))
# Seconds that texts have to end when a replica goes.
DRAIN = 30

server: Any = mlcc.asgi(
    os.environ.get("MLCC_MODEL", "/models/model.so"),
    alias=["model"],
    threads=THREADS,
    sequences=SEQUENCES,
    max_queue=SEQUENCES,
    drain_timeout=DRAIN,
)


@serve.deployment(
    ray_actor_options={"num_cpus": THREADS},
    # What a replica takes without a 429: its texts, and as many that wait.
    max_ongoing_requests=2 * SEQUENCES,
    autoscaling_config=AutoscalingConfig(min_replicas=1, max_replicas=4, target_ongoing_requests=SEQUENCES),
    request_router_config=RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
    ),
    # Ray waits for requests that run, then ends the application, which gives texts another DRAIN seconds.
    graceful_shutdown_timeout_s=DRAIN + 10,
    health_check_period_s=10,
    health_check_timeout_s=30,
)
@serve.ingress(server)
class Server:
    # The application of this replica, which is a copy of `server`; Ray sets it.
    app: Any

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises: its engine has died."""
        self.app.check()


app = Server.bind()
