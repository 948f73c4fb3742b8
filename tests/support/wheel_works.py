"""Try the installed package, of this interpreter, as a new user would: outside of the clone.

``python wheel_works.py`` runs the doctor and trains the README's script on two ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def main() -> None:
    script = README.read_text().split("```python\n# python script.py\n")[1].split("```")[0]
    commands = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(script)

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                sys.exit(f"{command}: {done.stdout}{done.stderr}")
            return done.stdout

        where = run(sys.executable, "-c", "import tagi_ddp; print(*tagi_ddp.__path__)").strip()
        assert "site-packages" in where, where
        ready = json.loads(run(commands / "tagi-ddp", "doctor", "--json"))["ready"]
        assert ready["one process"], ready
        assert ready["one host"], ready
        lines = run(commands / "tagi-ddp", "run", "-n", "2", "script.py").splitlines()
        replicas = {line.split()[-1] for line in lines if "network" in line}
        assert len(lines) == 2, lines
        assert len(replicas) == 1, lines
    print(f"{where} on Python {sys.version.split()[0]}: {lines[0]}")


if __name__ == "__main__":
    main()
