#!/usr/bin/env python3
"""Second turns that find their keys and values: the router of `serve --ray` beside Ray's own.

    cargo build --release
    python3 -m venv ray && ray/bin/pip install -r tests/ray/requirements.txt
    ray/bin/python bench/routers.py [-n 200]

Three Ray nodes on this machine, a replica of the demo model on each, -n conversations of two turns,
one after the other, so that replicas are idle in two thirds of the time. Then the same where Ray
takes no router and chooses by itself, the less busy one of two: as with a version of Ray whose
interface is another one. Fails where fewer than 90 % or, by chance, more than 45 % are found.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/ray"))
# Python runs this before a program: the import of Ray's interface for routers fails then.
WITHOUT = 'import sys\nsys.modules["ray.serve.request_router"] = None\n'


def share(machines, n):
    from cluster import App, second_turn

    app = App(machines, "-c", "512", "--parallel", "1", "-t", "1", "--profile", "none")
    assert app.is_ready(), app.said()
    try:
        return sum(second_turn(app, f"conversation {i}") for i in range(n)) / n, app.said()
    finally:
        app.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moeba", default=str(ROOT / "target/release/moeba"))
    parser.add_argument("-n", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mr", dir="/tmp") as folder:
        model = str(ROOT / "models/demo/moeba-demo.gguf")
        os.environ.update(MOEBA=args.moeba, MOEBA_DEMO=model, MOEBA_RAY_TEMP=folder)
        from cluster import Machines

        machines = Machines([{}, {}, {}])
        try:
            ours, said = share(machines, args.n)
            assert "router" not in said, said
            Path(folder, "sitecustomize.py").write_text(WITHOUT)
            os.environ["PYTHONPATH"] = folder
            rays, said = share(machines, args.n)
            assert "this version of Ray takes no router" in said, said
        finally:
            machines.end()
    print("| router | second turns with cached tokens |\n|---|--:|")
    print(f"| of moeba | {ours:.1%} |\n| of Ray | {rays:.1%} |")
    if ours < 0.9 or rays > 0.45:
        sys.exit("error: conversations do not stay, or stay by chance")


if __name__ == "__main__":
    main()
