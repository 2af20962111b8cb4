package receive

import "sync"

// slots is room for requests that are being written or wait for a connection.
// A source may hold at most twice as many as are free, and one client of it at
// most as many as are free: alone they come to two thirds and to half, and
// however many want more, there is room for the next. (A share of what is free
// rather than of all is the dynamic threshold of Choudhury and Hahne, 1998.)
type slots struct {
	limit int

	mu       sync.Mutex
	used     int
	bySource map[string]int
	byClient map[sender]int
}

// sender is a client of a source.
type sender struct {
	source string
	client client
}

func newSlots(limit int) *slots {
	return &slots{limit: limit, bySource: make(map[string]int), byClient: make(map[sender]int)}
}

func (s *slots) acquire(of sender) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.admits(of) {
		return false
	}
	s.used++
	s.bySource[of.source]++
	s.byClient[of]++
	return true
}

func (s *slots) release(of sender) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used--
	if s.bySource[of.source]--; s.bySource[of.source] == 0 {
		delete(s.bySource, of.source)
	}
	if s.byClient[of]--; s.byClient[of] == 0 {
		delete(s.byClient, of)
	}
}

func (s *slots) admits(of sender) bool {
	free := s.limit - s.used
	return free > 0 && s.bySource[of.source] < 2*free && s.byClient[of] < free
}

// free tells whether the sender would get a slot now.
func (s *slots) free(of sender) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.admits(of)
}

func (s *slots) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}
