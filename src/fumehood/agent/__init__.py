"""The agent's side: one tool, agent loops, approval, quotas and the audit log. All of it sits over a runner."""
