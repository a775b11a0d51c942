"""Every overlay, bare and with every component: schemas, and that names which mean the same thing are the same."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
# The oldest that has everything which stands here, and the newest of the package. Sleeping before the end is older than images as volumes.
VERSIONS = ("1.33", "1.37")
# Definitions of others, of which there is no schema.
OTHERS = {"ServiceMonitor", "InferencePool", "RayService", "LeaderWorkerSet"}
IMAGES = {"mlcc": "deploy/Containerfile", "mlcc-ranks": "deploy/ranks/Containerfile"}

Object = dict[str, Any]


def kustomize(program: str, overlay: str, components: list[str]) -> list[Object]:
    """The objects of an overlay with components, as users put them together."""
    with tempfile.TemporaryDirectory(dir=K8S) as folder:
        whole = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../overlays/{overlay}"],
            "components": [f"../components/{component}" for component in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(whole))
        done = subprocess.run([*program.split(), folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr, done.stderr
        return list(yaml.safe_load_all(done.stdout))


def validate(objects: list[Object]) -> None:
    for found in objects:
        if found["kind"] in OTHERS:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(found, version, strict=True)


def of_kind(objects: list[Object], kind: str) -> Object:
    found = [one for one in objects if one["kind"] == kind]
    assert len(found) == 1, (kind, len(found))
    return found[0]


def served(objects: list[Object]) -> tuple[Object, Object]:
    """What makes pods, and the template of those that serve."""
    groups = [one for one in objects if one["kind"] == "LeaderWorkerSet"]
    if not groups:
        deployment = of_kind(objects, "Deployment")
        return deployment, deployment["spec"]["template"]
    assert len(groups) == 1 and all(one["kind"] != "Deployment" for one in objects)
    return groups[0], groups[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]


def only(pod: Object) -> Object:
    """The container of a pod."""
    containers = pod["spec"]["containers"]
    assert len(containers) == 1
    return dict(containers[0])


def container(objects: list[Object]) -> Object:
    return only(served(objects)[1])


def check_group(objects: list[Object], base: list[Object]) -> None:
    """Pods of one group: the first is that of the Deployment, the others are beside it."""
    group, leader = served(objects)
    whole = group["spec"]["leaderWorkerTemplate"]
    worker = whole["workerTemplate"]
    for pod in (leader, worker):
        validate([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "rank"}, "spec": pod["spec"]}])
    assert whole["restartPolicy"] == "RecreateGroupOnPodRestart"
    variables = {one["name"]: one.get("value") for one in only(leader)["env"]}
    gpus = int(only(leader)["resources"]["limits"]["nvidia.com/gpu"])
    assert int(variables["MLCC_RANKS"]) == gpus * whole["size"]

    one, other = container(base), only(leader)
    for same in ("args", "ports", "readinessProbe", "livenessProbe", "lifecycle", "securityContext"):
        assert one[same] == other[same], same
    single = served(base)[1]["spec"]
    for same in ("automountServiceAccountToken", "securityContext", "terminationGracePeriodSeconds"):
        assert single[same] == leader["spec"][same] == worker["spec"][same], same
    for same in ("image", "command", "resources", "securityContext", "volumeMounts"):
        assert only(leader)[same] == only(worker)[same], same
    for same in ("volumes", "nodeSelector", "tolerations"):
        assert leader["spec"][same] == worker["spec"][same], same
    # Only the first one serves.
    assert not only(worker).keys() & {"args", "startupProbe", "readinessProbe", "livenessProbe"}
    service = of_kind(objects, "Service")["spec"]["selector"]
    assert not service.items() <= worker["metadata"]["labels"].items()
    # What ranks send to each other is let through, on both sides.
    policies = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "NetworkPolicy"}
    between = policies[group["metadata"]["name"]]
    ranks = between["podSelector"]["matchLabels"]
    assert all(ranks.items() <= pod["metadata"]["labels"].items() for pod in (leader, worker))
    for rules, side in (("ingress", "from"), ("egress", "to")):
        assert {side: [{"podSelector": {"matchLabels": ranks}}]} in between[rules]
    keys = next(volume for volume in leader["spec"]["volumes"] if volume["name"] == "rank-keys")
    place = next(mount for mount in only(leader)["volumeMounts"] if mount["name"] == "rank-keys")
    script = (ROOT / "deploy/ranks/rank-machines").read_text()
    assert f"MLCC_RANK_KEYS:-{place['mountPath']}" in script and keys["secret"]["secretName"] in script
    assert f"port={only(worker)['ports'][0]['containerPort']}\n" in script
    # Its controller makes a Service of its name.
    assert group["metadata"]["name"] != of_kind(objects, "Service")["metadata"]["name"]


def check(objects: list[Object], pool: bool) -> None:
    made, pod = served(objects)
    name = made["metadata"]["name"]
    labels = pod["metadata"]["labels"]
    program = container(objects)
    ports = {port["name"]: port["containerPort"] for port in program["ports"]}

    # Whoever selects pods selects these.
    service = of_kind(objects, "Service")
    policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
    selectors = [
        service["spec"]["selector"],
        of_kind(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *(policy["podSelector"]["matchLabels"] for policy in policies),
    ]
    if made["kind"] == "Deployment":
        selectors.append(made["spec"]["selector"]["matchLabels"])
    if pool:
        spec = of_kind(objects, "InferencePool")["spec"]
        selectors.append(spec["selector"]["matchLabels"])
        assert [port["number"] for port in spec["targetPorts"]] == list(ports.values())
    for selector in selectors:
        assert selector and selector.items() <= labels.items(), (selector, labels)
    monitor = of_kind(objects, "ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    scaled = of_kind(objects, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (scaled["apiVersion"], scaled["kind"], scaled["name"]) == (made["apiVersion"], made["kind"], name)
    assert "replicas" not in made["spec"], "the autoscaler's number would be set back"

    # Ports by name.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert program[probe]["httpGet"]["port"] in ports, probe
    of_service = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    assert set(of_service.values()) <= ports.keys()
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= of_service.keys()
    of_server = [one["ingress"] for one in policies if one["podSelector"]["matchLabels"] == service["spec"]["selector"]]
    assert len(of_server) == 1
    for rule in of_server[0]:
        assert {port["port"] for port in rule["ports"]} <= ports.keys()

    # Nothing is written, and nobody is root.
    security = program["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    user = pod["spec"]["securityContext"]["runAsUser"]
    image = (ROOT / IMAGES[program["image"].split(":")[0]]).read_text()
    assert f"\nUSER {user}:{user}\n" in image
    assert f"-t {program['image']} ." in image
    mounts = {mount["name"]: mount for mount in program["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    artifact = next(arg for arg in program["args"] if arg.endswith(".so"))
    assert artifact.startswith(mounts["models"]["mountPath"] + "/") and mounts["models"]["readOnly"]
    amounts = program["resources"]
    for amount in ("cpu", "memory"):
        assert amounts["requests"][amount] == amounts["limits"][amount]


def check_ray() -> None:
    """The application of the RayService is that of serve.yaml; its pods are right."""
    alone = yaml.safe_load((ROOT / "examples/ray/serve.yaml").read_text())
    service = yaml.safe_load((ROOT / "examples/ray/rayservice.yaml").read_text())
    within = yaml.safe_load(service["spec"]["serveConfigV2"])
    # A pod listens for others, a machine for itself.
    assert (alone["http_options"].pop("host"), within["http_options"].pop("host")) == ("127.0.0.1", "0.0.0.0")
    assert alone == within
    cluster = service["spec"]["rayClusterConfig"]
    image = (ROOT / "examples/ray/Containerfile").read_text()
    assert f"/ray:{cluster['rayVersion']}-py" in image
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        validate([{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": spec}])
        for one in spec["containers"]:
            assert f"-t {one['image']} ." in image


def main() -> None:
    program = sys.argv[1]
    components = sorted(folder.name for folder in (K8S / "components").iterdir())
    for overlay in sorted(folder.name for folder in (K8S / "overlays").iterdir()):
        for chosen in [[], *([one] for one in components), components]:
            objects = kustomize(program, overlay, chosen)
            validate(objects)
            check(objects, "inference-pool" in chosen)
            if served(objects)[0]["kind"] == "LeaderWorkerSet":
                check_group(objects, kustomize(program, "nvidia", chosen))
            print(f"{overlay} with {', '.join(chosen) or 'nothing more'}: {len(objects)} objects")
    check_ray()
    print("examples/ray: one application")


if __name__ == "__main__":
    main()
