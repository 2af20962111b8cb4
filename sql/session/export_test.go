package session

// Made returns the names of the settings that every session gets.
func Made() []string {
	var names []string
	for name := range every {
		names = append(names, name)
	}
	for _, g := range guarded {
		names = append(names, g.name)
	}
	return names
}
