"""`baton top`: a deployment in a terminal, from the scheduler's descriptions of it.

view    the figures, computed from two descriptions, without a terminal
events  the changes between them
app     the screen and its keys, with textual, which nothing else imports
"""
