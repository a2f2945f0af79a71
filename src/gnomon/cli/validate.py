"""`gnomon validate`: a table of the user's own measured runs, each predicted and compared.

`run(options)` prints and returns 0. Leaves out published tables, whose columns are free text (`evidence`, outside the
package).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.cli.options.tools import ValidateOptions
from gnomon.cli.runs_table import read_runs
from gnomon.cli.terminal import print_json, print_lines
from gnomon.report.measured import compare_runs, comparison_text


def run(options: ValidateOptions) -> int:
    """Reads the measured runs, predicts each and prints the errors."""
    done, refused = compare_runs(read_runs(Path(options.table)))
    if options.json:
        print_json(
            {
                "schema": "gnomon.validation/2",
                "runs": [row.to_mapping() for row in done],
                "refused": [{"id": gone.id, "reason": gone.reason} for gone in refused],
            }
        )
    else:
        print_lines(comparison_text(done, refused))
    return 0
