"""The paper's table and figures, run again."""
