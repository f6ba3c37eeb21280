"""Conversations with models, one module for each vendor's SDK; see :class:`fumehood.agent.loop.Conversation`."""
