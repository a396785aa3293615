"""A wheel holds the package, its tuned tables and its licence, all of them and nothing else.

python .ci/check_wheel.py WHEEL
"""

import sys
import zipfile
from pathlib import Path


def expected(root: Path) -> set[str]:
    sources = [*(root / "tritonattn").rglob("*.py"), root / "tritonattn/py.typed"]
    tables = (root / "autotune_cache").rglob("*.json")
    names = {str(p.relative_to(root)) for p in sources}
    return names | {f"tritonattn/{p.relative_to(root)}" for p in tables}


def main() -> int:
    names = set(zipfile.ZipFile(sys.argv[1]).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    wanted = expected(Path(__file__).resolve().parents[1])
    faults = [f"missing: {name}" for name in sorted(wanted - names)]
    faults += [f"not wanted: {name}" for name in sorted(names - metadata - wanted)]
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        faults.append("missing: LICENSE")
    print("\n".join(faults) or f"{len(names)} files, as they should be")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
