"""`baton top`: a deployment in a terminal, from the scheduler's descriptions of it.

view    its figures, without a terminal
app     the screen and its keys, with textual, which nothing else imports
"""
