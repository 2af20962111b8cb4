// Command postern delivers webhooks from a transactional outbox in PostgreSQL.
package main

func main() {}
