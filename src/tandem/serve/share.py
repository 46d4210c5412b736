"""How much of a limit one client may take: the last part is kept for clients that hold no more than that part."""


def over_share(what: str, limit: int, part: float, in_all: int, held: int, more: int) -> str | None:
    """Why so many more are too many; None: there is room.

    what   what is counted.      part   share of the limit that is kept.      held   of in_all, this client's.
    """
    reserve = int(limit * part)
    if in_all + more <= limit - reserve or (in_all + more <= limit and held + more <= reserve):
        return None
    now = f"{in_all} {what} are in the server, {held} of them this client's, and with {more} more the limit of "
    if in_all + more > limit:
        return f"{now}{limit} would be passed."
    return f"{now}{limit - reserve} would be passed; {reserve} are kept for clients that hold no more than that."
