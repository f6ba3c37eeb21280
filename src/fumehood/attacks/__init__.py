"""The attack suite: proves, on this host, what each tier holds.

Theory of operation::

    suite         chooses attacks and tiers, starts workers, prints the matrix      suite.py report.py mutation.py
      └── worker  one attack on one tier: a supervisor of its own, with canaries    worker.py engine.py
            │     in its environment, memory, descriptors and folder                stage.py
            ├── bystander    another process of the same user: a victim             stage.py
            └── the tier     runs the attacker's program                            catalogue.py and the groups

Each worker is a supervisor in its own right, so that what is measured of it (memory, descriptors, descendants) belongs
to one attack. It adopts orphans (PR_SET_CHILD_SUBREAPER), so that no process of a sandbox leaves its tree unseen. The
host is the only witness: :mod:`~fumehood.attacks.observe` gathers, :mod:`~fumehood.attacks.watch` judges. An attack
counts only if it succeeds on the control (:mod:`~fumehood.attacks.control`), where nothing is enforced.

An attack is data plus a short program: a row in ``resources files kernel network credentials results lifecycle
posture``. A new tier joins by its name in the registry; a new attack by a row.
"""
