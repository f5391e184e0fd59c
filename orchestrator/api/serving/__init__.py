"""The endpoints that generate: requests checked, admitted and answered from the stream of text."""
