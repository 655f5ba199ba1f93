"""How long a mesh of child processes may take to start and to stop, and how often a process is started again."""

START_TIMEOUT_S = 300.0
"""From the first process to the last one ready. Loading a large model takes most of it."""
STOP_TIMEOUT_S = 15.0
"""A service that is no worker, from SIGTERM to its end; then it is killed."""
STOP_SLACK_S = 20.0
"""A worker may take so long beyond its `drain_s`: what it leaves behind takes up to `leave_s` of it."""

ASK_TIMEOUT_S = 3.0
"""A question to the scheduler."""
ASK_INTERVAL_S = 0.05
"""Between two of them, until it knows all workers."""
ANSWERS_OF_EACH = 5
"""Right answers in a row for each scheduler that there is: a question reaches any one of them."""

LOG_BYTES = 8 * 1024 * 1024
"""A service's log file grows to about this, and one before it is kept."""
LOG_LOOK_S = 30.0
"""So often that is looked at."""

EXIT_DRAINED = 10
"""A worker's exit code once an operator has had it leave: it is not started again."""
EXIT_AGAIN = 11
"""The same where it is to be started again."""
