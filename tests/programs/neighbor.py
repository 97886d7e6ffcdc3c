"""A module that echo_argv.py imports from its own folder, as scripts do."""

WHO = "neighbor"
