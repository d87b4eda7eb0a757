"""The one error meant for people: the command line prints it as one message and exits with code 2."""


class TenfoldError(Exception):
    """Something the user can put right: the message names what was wrong, where, and what would be right."""
