"""Render deploy/helm with the values of each example, for people without Helm.

    python tools/render_chart.py            write deploy/helm/rendered/
    python tools/render_chart.py --check    fail if these files differ from what the chart renders

Needs the extra `deploy`, which provides Helm as a library.
"""

from __future__ import annotations

import sys
from pathlib import Path

import helm_python
import yaml

HELM = Path(__file__).parent.parent / "deploy" / "helm"
CHART = HELM / "serve-llm"
RENDERED = HELM / "rendered"
RELEASE = "llm"
NAMESPACE = "serve-llm"


def render(values: Path) -> str:
    """Return the manifests of a release with these values, without the labels that say that Helm manages them."""
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(yaml.safe_load(values.read_text()) or {}, name=RELEASE, namespace=NAMESPACE)
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml") and text.strip()]
    lines = [line for text in texts for line in ["---", *text.strip().removeprefix("---").strip().splitlines()]]
    kept = [line.rstrip() for line in lines if "managed-by: Helm" not in line and "helm.sh/" not in line]
    head = f"# deploy/helm/serve-llm with deploy/helm/examples/{values.name}: change these, then tools/render_chart.py."
    return "\n".join([head, *kept]) + "\n"


def main() -> int:
    stale = []
    for values in sorted((HELM / "examples").glob("*.yaml")):
        text = render(values)
        path = RENDERED / values.name
        if "--check" in sys.argv[1:]:
            if path.read_text() != text:
                stale.append(path.name)
        else:
            path.write_text(text)
    for name in stale:
        print(f"stale: deploy/helm/rendered/{name}; run tools/render_chart.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
