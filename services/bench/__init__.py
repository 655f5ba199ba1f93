"""The measurements of `kvmesh bench`, one module for each command: they send HTTP requests to a gateway, as a client
does. What they share is in `drive/`."""
