"""Published training runs: a CSV table of measurements, one run a row, as models, plans, clusters and seconds.

`read_runs(path)` returns `Run`s, and `Refused` rows with the reason. Leaves out predicting and scoring (`report`).
"""

from gnomon.formats.published.notes import NoteFacts as NoteFacts
from gnomon.formats.published.row import COLUMNS as COLUMNS
from gnomon.formats.published.row import Refused as Refused
from gnomon.formats.published.row import Row as Row
from gnomon.formats.published.row import read_table as read_table
from gnomon.formats.published.row import unread_columns as unread_columns
from gnomon.formats.published.run import Run as Run
from gnomon.formats.published.run import read_runs as read_runs
from gnomon.formats.published.run import to_run as to_run
