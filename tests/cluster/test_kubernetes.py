"""The manifests for Kubernetes, held against the models of the training operator's own client."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
REASON = "the manifests' models need: pip install kubeflow-training"

training = pytest.importorskip("kubeflow.training", reason=REASON)
kubernetes = pytest.importorskip("kubernetes.client", reason=REASON)
yaml = pytest.importorskip("yaml", reason=REASON)


def faults(value: Any, kind: str, where: str) -> list[str]:
    """Return where ``value``, of a manifest, is not what the client's model ``kind`` describes."""
    if match := re.fullmatch(r"list\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [f for i, part in enumerate(value) for f in faults(part, match[1], f"{where}[{i}]")]
    if match := re.fullmatch(r"dict\((.*), (.*)\)", kind):
        if not isinstance(value, dict):
            return [f"{where} is no map"]
        return [f for key, part in value.items() for f in faults(part, match[2], f"{where}.{key}")]
    if kind in ("object", "str", "int", "bool", "float", "datetime"):
        wanted = {"str": (str, int), "int": int, "bool": bool}.get(kind, object)
        return [] if isinstance(value, wanted) else [f"{where} is no {kind}"]
    model = getattr(training, kind, None) or getattr(kubernetes, kind)
    fields = {
        name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()
    }
    if not isinstance(value, dict):
        return [f"{where} is no {kind}"]
    unknown = [f"{where}.{name} is unknown to {kind}" for name in value.keys() - fields.keys()]
    known = [name for name in value if name in fields]
    return unknown + [f for n in known for f in faults(value[n], fields[n], f"{where}.{n}")]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_a_manifest_fits_the_operators_models(path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    assert faults(job, f"KubeflowOrgV1{job['kind']}", path.stem) == []


def test_what_does_not_fit_is_found() -> None:
    job = {"kind": 3.0, "metadata": {"nam": "x"}, "spec": {"runPolicy": []}}
    found = faults(job, "KubeflowOrgV1PyTorchJob", "job")
    assert found == [
        "job.kind is no str",
        "job.metadata.nam is unknown to V1ObjectMeta",
        "job.spec.runPolicy is no KubeflowOrgV1RunPolicy",
    ]
