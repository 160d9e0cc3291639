"""What the scripts are made of: small modules, each importable and testable alone."""


class UserError(ValueError):
    """Bad input from a person. The message is one sentence that says what to do.

    Modules raise it where the bad value enters; `configurator.configure` makes every script print the
    sentence and exit with status 2, without a traceback.
    """
