"""The error tree.

Every error takes one string, so that it pickles and comes back from another process as itself.
Each class also derives from the standard class that a caller would expect. Text: *what and where: got X; want Y. Do Z.*
"""


class TloraError(Exception):
    """Anything a user, a file, a GPU or a cluster can cause."""


class SpecError(TloraError, ValueError):
    """A job file says what cannot be: an unknown key, a value out of range, a field that differs on resume."""


class ModelError(TloraError, ValueError):
    """The base model cannot be reached, or cannot carry adapters as asked."""


class TargetError(ModelError):
    """An adapter's targets match no module, or one that cannot be adapted."""


class DataError(TloraError, ValueError):
    """A job's data cannot be read, or leaves nothing to train on."""


class CheckpointError(TloraError, RuntimeError):
    """A saved state is missing, incomplete, damaged or does not fit its job."""


class JobError(TloraError, RuntimeError):
    """One job cannot go on; its neighbours can."""


class StateError(TloraError, RuntimeError):
    """A transition that a job's present state does not allow."""


class ClusterError(TloraError, RuntimeError):
    """The cluster, or its scheduler, cannot be reached or is another's."""


class GoneError(ClusterError):
    """There is no cluster, or no scheduler on it: nothing runs that is not saved."""


class GroupError(TloraError, RuntimeError):
    """A rank of a group is gone, or did not answer in time: none of the group's jobs can go on from here."""
