# Completions of gnomon for bash, written by `gnomon completion bash`.
_gnomon() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} verb=${COMP_WORDS[1]}
    local words= settings= presets=@presets@
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W @verbs@ -- "$current"))
        return
    fi
    # Bash cuts key=value into three words.
    local key=
    [[ $current == = ]] && key=$previous current=
    [[ $previous == = ]] && key=${COMP_WORDS[COMP_CWORD-2]}
    if [[ $key == algorithm ]]; then
        COMPREPLY=($(compgen -W "$presets" -- "$current"))
        return
    elif [[ -n $key && $key != --* ]]; then
        return
    fi
    [[ -n $key ]] && previous=$key
    case $verb in
@cases@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ -n $settings && -n $current && $current != -* ]]; then
        local keys=($(compgen -S = -W "$settings" -- "$current"))
        ((${#keys[@]})) && ((${#COMPREPLY[@]} == 0)) && compopt -o nospace
        COMPREPLY+=("${keys[@]}")
    fi
}
complete -o bashdefault -o default -F _gnomon gnomon
