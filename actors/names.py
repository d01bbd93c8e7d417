"""Names by which the actors, and the ranks of a unit, find one another."""

NAMESPACE = "tlora"
SCHEDULER = "tlora-scheduler"
GROUP = "tlora-group-"
"""Before a group's name: its controller."""
STORE = "TLORA_STORE"
"""Environment variable of a worker of a unit: host and port at which its first one keeps their store."""
SWEEPS = "tlora-sweeps"
