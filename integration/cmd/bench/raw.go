package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"postern/outbox/signature"
)

// The raw client is the limit: net/http posting signed bodies from memory, as
// wide as its idle connections, with no database behind it.
var rawClient = contender{
	name: "raw",
	command: func(ctx context.Context, b *bench, _ *database, w work) *exec.Cmd {
		return role(ctx, "raw", rawSettings{b.sink.port, w.Destinations, w.N, w.Slots, w.Payload})
	},
}

type rawSettings struct{ Port, Destinations, N, Slots, Payload int }

func runRaw(s rawSettings) error {
	key, err := signature.ParseSecret(secret)
	if err != nil {
		return err
	}
	content := []byte(body(s.Payload))
	urls := make([]string, s.Destinations)
	for i := range urls {
		urls[i] = address(s.Port, i) + "ok"
	}
	poster := newPoster(s.Slots)
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var posters sync.WaitGroup
	for range s.Slots {
		posters.Go(func() {
			for failed.Load() == nil {
				i := int(next.Add(1))
				if i > s.N {
					return
				}
				if err := poster.post(context.Background(), urls[i%len(urls)], "m"+strconv.Itoa(i), content, []signature.Secret{key}); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	posters.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// poster is the HTTP half of the raw client, of River's worker and of the naive
// one.
type poster struct{ client http.Client }

func newPoster(slots int) *poster {
	return &poster{http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{
			MaxIdleConnsPerHost: slots,
			DisableCompression:  true,
			WriteBufferSize:     8 << 10,
		},
	}}
}

// post sends the headers that Postern sends.
func (p *poster) post(ctx context.Context, url, id string, content []byte, secrets []signature.Secret) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(content))
	if err != nil {
		return err
	}
	signed, err := signature.Headers(signature.Standard, secrets, id, time.Now(), content)
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("User-Agent", "Postern/bench")
	for _, h := range signed {
		r.Header.Set(h.Name, h.Value)
	}
	answer, err := p.client.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("answered %d", answer.StatusCode)
	}
	return nil
}
