"""The paper's studies: each draws a figure, writes its numbers, and says in a few lines what they show."""
