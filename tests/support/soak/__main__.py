"""`make soak`: both backends, or one, for a while; exit code 1 when anything was wrong."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from diptych.common_config.namespaces.disagg import TRANSFER_BACKENDS
from support.soak.answers import Answers
from support.soak.run import Soak
from support.tiny_model import save_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each backend")
    parser.add_argument("--backend", choices=TRANSFER_BACKENDS, action="append")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--output", type=Path, default=Path("build/soak"), help="where workers' output goes")
    arguments = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory(prefix="soak-model-") as directory:
        model = save_tiny_model(Path(directory))
        answers = Answers(arguments.seed, model)
        for backend in arguments.backend or TRANSFER_BACKENDS:
            print(f"soak over {backend}, seed {arguments.seed}: {arguments.seconds:g} s", flush=True)
            output = arguments.output / f"{backend}-{arguments.seed}"
            report = Soak(backend, arguments.seed, model, answers, output).run(arguments.seconds)
            print(report.text(), flush=True)
            if report.violations:
                print(f"  output of the workers: {output}", flush=True)
                wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
