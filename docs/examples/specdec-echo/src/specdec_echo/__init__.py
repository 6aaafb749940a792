"""The echo drafter of specdec.

``plugin`` registers the kind, ``provider`` opens groups of rows, ``rows`` has the verbs of the
contract, and ``history`` has the method: what one row has read, and what it proposes.
"""
