"""The learner's side of a weight push: `pusher.WeightPusher`, its transfer methods, and control of single engines.

Runs in the learner; `engine_control` also in `swarmq up` and `swarmq engine`.
"""
