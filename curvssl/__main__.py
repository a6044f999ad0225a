from curvssl.cli import main

main()
