"""What the scripts are made of: small modules, each importable and testable alone."""

import errno


class UserError(ValueError):
    """Bad input from a person. The message is one sentence that says what to do.

    Modules raise it where the bad value enters; `configurator.configure` makes every script print the
    sentence and exit with status 2, without a traceback.
    """


NO_THREAD = "Failed to launch worker thread", "can't start new thread"  # words of pyarrow and Python
_translations = []


def explain_errors(translate):
    """From now on other errors, too, end the script with one sentence and status 2.

    translate(error): the sentence, or None for an error that it does not know. The newest function is asked
    first.
    """
    _translations.append(translate)


def explained(error):
    """The UserError in place of an error that a function of `explain_errors` knows, of a file that this user
    may not touch, of a name that is too long, or of a limit of memory or threads; else the error itself.
    Whatever prints the last error of a process asks for this first."""
    for translate in reversed(_translations) if not isinstance(error, UserError) else ():
        try:
            if sentence := translate(error):
                return UserError(sentence)
        except Exception:  # it must not hide the error that it was asked about
            continue
    if isinstance(error, PermissionError) and error.filename:  # a colleague's folder on a shared machine
        return UserError(f"{error.filename}: no permission; ask its owner for it, or name another place")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(
            f"no file or folder can be called {str(error.filename)[:80]}...; give a shorter name"
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_THREAD):
        what = str(error).strip() or "out of memory"
        return UserError(
            f"this process lacks memory or threads ({what}); end other programs, or raise its limits "
            "(ulimit -v, ulimit -u)"
        )
    return error
