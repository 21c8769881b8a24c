"""SHA-256 sums of the files that DeepSpeed's data analyzers make of the cases of `tests/helpers/analyzer_cases.py`.

    python -m venv ds && ds/bin/pip install torch numpy && DS_BUILD_OPS=0 ds/bin/pip install deepspeed==0.19.6
    ds/bin/python tools/deepspeed_analyzer_sums.py tests/unit/curriculum/deepspeed_analyzer.json

Runs in an environment with DeepSpeed and without this package; the project's own does not need it. Map files with
sample numbers (`NAME_metric_to_sample_VALUE.csv`) are many: one sum stands for those of a folder and metric.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update({"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})

from tests.helpers import analyzer_cases as cases


def main() -> None:
    """Write the sums as JSON into the file that is named: case -> "serial" or "distributed" -> file -> sum."""
    import deepspeed
    from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])})
    deepspeed.init_distributed("gloo")
    found: dict[str, object] = {"made with": f"deepspeed {deepspeed.__version__}"}
    for name in cases.CASES:
        with tempfile.TemporaryDirectory() as folder:
            serial, distributed = Path(folder, "serial"), Path(folder, "distributed")
            cases.run_serial(data_analyzer.DataAnalyzer, name, serial)
            arguments, _, _ = cases.common(name, distributed)
            data_analyzer.DistributedDataAnalyzer(device="cpu", **arguments).run_map_reduce()
            found[name] = {"serial": cases.sums(serial), "distributed": cases.sums(distributed)}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
