"""Makes the dashboards: `python compose/grafana/build.py [FOLDER]`. What it writes is committed; a test keeps it fresh.

Queries use metrics of docs/metrics.md's table only. Every description says what to do when a panel looks bad.
"""

import sys
from pathlib import Path

import page_glance
import page_kv
import page_ttft
import page_worker

FOLDER = Path(__file__).parent / "dashboards"
PAGES = {
    "glance": page_glance.PAGE,
    "ttft": page_ttft.PAGE,
    "kv": page_kv.PAGE,
    "worker": page_worker.PAGE,
}


def build(folder: Path) -> None:
    """Write every dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.json").write_text(page)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
