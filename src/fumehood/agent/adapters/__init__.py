"""The tool in the form that each agent framework wants; each module needs that framework's package."""
