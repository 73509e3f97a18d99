"""`baton top`: a deployment in a terminal, from the scheduler's descriptions of it.

view    what is shown, computed from two descriptions; knows no terminal
events  what changed between them
app     the screen and its keys, with textual, which nothing else imports
"""
