// Command counterpart signs and verifies for the JavaScript tests: it reads a
// JSON list of requests on standard input and answers each, in order, on
// standard output. What it refuses it answers with the error; it exits non-zero
// only when it cannot read the list.
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"time"

	"postern/outbox/signature"
)

// request asks to sign when it names a style, and to verify when it names a
// scheme.
type request struct {
	Style   string
	Scheme  string
	Secrets []string
	ID      string
	At      int64 // Unix seconds: of the attempt, or of the judgement
	Body    []byte
	Headers map[string][]string
}

type answer struct {
	Headers map[string]string `json:"headers,omitempty"`
	Error   string            `json:"error,omitempty"`
}

func main() {
	var list []request
	if err := json.NewDecoder(os.Stdin).Decode(&list); err != nil {
		fmt.Fprintln(os.Stderr, "read the requests:", err)
		os.Exit(1)
	}
	answers := make([]answer, len(list))
	for i, r := range list {
		headers, err := r.run()
		if err != nil {
			answers[i].Error = err.Error()
		}
		answers[i].Headers = headers
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		fmt.Fprintln(os.Stderr, "write the answers:", err)
		os.Exit(1)
	}
}

func (r request) run() (map[string]string, error) {
	if r.Style != "" {
		return r.sign()
	}
	return nil, r.verify()
}

func (r request) sign() (map[string]string, error) {
	style, err := signature.ParseStyle(r.Style)
	if err != nil {
		return nil, err
	}
	secrets, err := r.parse(signature.Scheme{})
	if err != nil {
		return nil, err
	}
	list, err := signature.Headers(style, secrets, r.ID, time.Unix(r.At, 0), r.Body)
	if err != nil {
		return nil, err
	}
	headers := make(map[string]string, len(list))
	for _, h := range list {
		headers[h.Name] = h.Value
	}
	return headers, nil
}

func (r request) verify() error {
	scheme, err := signature.ParseScheme(r.Scheme)
	if err != nil {
		return err
	}
	secrets, err := r.parse(scheme)
	if err != nil {
		return err
	}
	return scheme.Verify(http.Header(r.Headers), r.Body, time.Unix(r.At, 0), signature.DefaultTolerance, secrets...)
}

func (r request) parse(scheme signature.Scheme) ([]signature.Secret, error) {
	secrets := make([]signature.Secret, len(r.Secrets))
	for i, text := range r.Secrets {
		s, err := scheme.Secret(text)
		if err != nil {
			return nil, err
		}
		secrets[i] = s
	}
	return secrets, nil
}
