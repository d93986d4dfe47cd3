"""The manifest of the guide about Kubernetes: its parts fit together, and its command runs."""

import pytest
import yaml  # which Flax brings
from shells import make_shell, on_loopback, read_blocks, run


@pytest.fixture(scope="module")
def manifest():
    (text,) = read_blocks("kubernetes.md", "yaml")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_the_service_is_that_of_the_pods(manifest):
    service, job = manifest["Service"], manifest["Job"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]


def test_the_numbers_are_those_of_the_command(manifest):
    job = manifest["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    (command,) = container["args"]
    name, service = (manifest[kind]["metadata"]["name"] for kind in ("Job", "Service"))
    assert job["completionMode"] == "Indexed"
    assert f"--nodes {job['completions']} " in command
    assert job["parallelism"] == job["completions"]
    assert f"--processes {container['resources']['limits']['nvidia.com/gpu']} " in command
    assert f"--address {name}-0.{service}:" in command
    (volume,) = job["template"]["spec"]["volumes"]
    assert volume["name"] == container["volumeMounts"][0]["name"]


def test_the_command_of_both_pods_trains_one_model(manifest, tmp_path):
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    command = on_loopback(container["args"][0])
    pods = [f"export JOB_COMPLETION_INDEX={index}\n{command}" for index in range(2)]
    first, second = run(pods, tmp_path, make_shell(tmp_path))
    assert first == second
    assert len(first) == 3
