"""The operator room: decides who holds each GPU second and makes it so."""
