"""Published training runs: a CSV table of measurements, one run a row, as models, plans, clusters and seconds.

`read_runs(path)` returns `Run`s, and `RefusedRun` rows with the reason. Leaves out predicting and scoring (`report`).
"""

from evidence.published.notes import NoteFacts as NoteFacts
from evidence.published.row import COLUMNS as COLUMNS
from evidence.published.row import Refused as Refused
from evidence.published.row import Row as Row
from evidence.published.row import read_table as read_table
from evidence.published.row import unread_columns as unread_columns
from evidence.published.run import Run as Run
from evidence.published.run import read_runs as read_runs
from evidence.published.run import to_run as to_run
