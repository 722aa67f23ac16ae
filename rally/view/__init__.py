"""What an agent did can be looked at: a page over run folders, served on this machine or written as one file."""
