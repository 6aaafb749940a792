"""What a round costs where it runs, and how many drafts pay.

``curve`` holds measured times, ``survival`` how likely drafts are to be accepted, ``choose`` puts
the two together; ``measure`` times a target, ``store`` keeps what was measured.
"""
