"""The errors meant for people: the command line prints each as one message."""


class TenfoldError(Exception):
    """Something the user can put right: the message names what was wrong, where, and what would be right.

    The command line exits with code 2.
    """


class RanksLost(Exception):  # noqa: N818 - what happened
    """Another rank died, hung, or stopped for a reason of its own: the run may go on when it is resumed.

    The command line exits with `code`: that of the rank that stopped, or 75 where it could not say any.
    """

    code = 75
