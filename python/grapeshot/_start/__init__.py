"""Starts programs on the loop: ``install``, ``run``, policies, ``python -m grapeshot``, GRAPESHOT_INSTALL."""
