"""Parameter servers on tiers of reliability, and work that flows away from stragglers.

The design is in docs/parameter-servers.md.
"""
