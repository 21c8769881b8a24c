"""The script in the guide on data analysis."""

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs/guides/data-analysis.md"


def test_the_script_of_the_guide_prints_what_it_says(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(script.splitlines()) <= 60
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 words: samples [1, 3]", "3 words: samples [0]", "6 words: samples [2]"]
