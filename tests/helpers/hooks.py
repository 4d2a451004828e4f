"""Where tests stand in the way of the scripts' functions.

What a hook needs of a call it takes by the name of the parameter: a script may reorder its
parameters, and have others besides. A hook lasts as long as the process, or as long as a test where
it is set with put=monkeypatch.setattr.
"""

import functools
import inspect


def around(owner, name, instead, put=setattr):
    """Puts instead(call, given) in the place of owner.name.

    given: {parameter: argument}, which instead may change; call() goes on with it.
    """
    function = getattr(owner, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def hooked(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        return instead(lambda: function(*bound.args, **bound.kwargs), bound.arguments)

    put(owner, name, hooked)


def before(owner, name, do, put=setattr):
    """do(given) before each call of owner.name, which do may stop by an error."""
    around(owner, name, lambda call, given: (do(given), call())[1], put)
