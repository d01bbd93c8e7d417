"""Names by which the actors find one another."""

NAMESPACE = "tlora"
SCHEDULER = "tlora-scheduler"
GROUP = "tlora-group-"
"""Before a group's name: its controller."""
SWEEPS = "tlora-sweeps"
