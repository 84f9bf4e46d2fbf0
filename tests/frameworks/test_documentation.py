"""docs/frameworks.md: every snippet is run as its reader would; manifests pass their linters."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.frameworks.checks import LIMIT_S
from tests.launch import ROOT, TORCHRUN

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
BEGINNING = re.findall(r"```python\n(.*?)```", PAGE.split("\n## ")[0], re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
SNIPPETS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in SECTIONS.items()}
CLUSTER = ROOT / "examples" / "cluster"


def tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_every_framework_has_one_snippet() -> None:
    assert {name: len(found) for name, found in SNIPPETS.items()} == {
        **dict.fromkeys(
            ("Lightning", "Fabric", "Transformers", "Accelerate", "Ray Train", "HSDP", "torchft"), 1
        ),
        "Beyond one host": 0,
    }


@pytest.mark.parametrize("name", [n for n, found in SNIPPETS.items() if found and n != "Ray Train"])
def test_a_snippet_trains_through_tailcut(name: str, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text("\n".join([*BEGINNING, *SNIPPETS[name]]))
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    ops = [
        int(count) for count in re.findall(r"(\d+) ops, \d+ partial", done.stdout)
    ]  # lines may run together
    assert len(ops) == 2 * SNIPPETS[name][0].count("print(")
    assert min(ops) > 0


def test_the_snippet_of_ray_is_a_part_of_its_example() -> None:
    assert SNIPPETS["Ray Train"][0] in (ROOT / "examples" / "ray_train.py").read_text()


def test_the_job_for_slurm_passes_shellcheck() -> None:
    subprocess.run([tool("shellcheck"), str(CLUSTER / "slurm.sbatch")], check=True)


def test_the_job_for_kubernetes_is_valid() -> None:
    file = CLUSTER / "kubernetes.yaml"
    rules = "{extends: default, rules: {line-length: {max: 110}}}"
    subprocess.run([tool("yamllint"), "--strict", "-d", rules, str(file)], check=True)
    job = yaml.safe_load(file.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **replica["template"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)
