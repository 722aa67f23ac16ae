"""The viewer: a web page over run folders, served on this machine or exported as one file."""
